"""Packaging: the ranges that work. Exact versions are in `third_party/python/`.

`launch/`, `configs/` and `experiments/` are run from the repository root and are not installed.
"""

from setuptools import find_packages, setup

# An HTTP server that others keep well, for launch.serve --engine=embedded.
SERVE = ["starlette>=1.10", "uvicorn>=0.55"]

setup(
  name="agentrl_jax",
  version="0.1.0",
  description="Multi-turn agentic reinforcement learning of language models in JAX",
  long_description="Agents, rewards, losses and weight transfer as small composable functions; "
  "rollouts from SGLang or an embedded JAX sampler.",
  python_requires=">=3.11",
  packages=find_packages(include=["agentrl_jax", "agentrl_jax.*"]),
  install_requires=[
    # Device side.
    "jax>=0.10.2",
    "flax>=0.12.8",  # flax.struct only
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "chex>=0.1.92",
    "numpy>=2.4",
    "scipy>=1.17",  # linear programmes and distributions; jax needs it as well
    "jaxtyping>=0.3.11",
    # Data and configuration.
    "tensorflow-datasets>=4.9.10",  # array_record files; TensorFlow itself is never imported
    "importlib_resources>=7.1",  # tensorflow-datasets imports it without declaring it
    "grain>=0.2.18",
    "pyarrow>=26",
    "absl-py>=2.5",
    "fiddle>=0.3.1",
    "etils[epath]>=1.15",
    # Models and engines.
    "tokenizers>=0.23",
    "transformers>=5.24,<6",  # chat templates and tokenizers; works without torch
    "jinja2>=3.1",  # what chat templates are written in
    "safetensors>=0.8",
    "gguf>=0.19",
    "httpx>=0.28",
    "jsonschema>=4.26",
    "psutil>=7.2",
    # What a person sees.
    "rich>=15",
    "matplotlib>=3.11",
    "tensorboard>=2.21",
  ],
  extras_require={
    "serve": SERVE,
    "test": [
      *SERVE,
      "pytest>=9.2",
      "pytest-xdist>=3.8",
      "pytest-timeout>=2.4",
      "hypothesis>=6.170",
      "ruff>=0.17.6",
      "pyright>=1.1.414",
      "setuptools>=84",  # builds this package without fetching a build environment
    ],
    "cuda13": ["jax[cuda13]>=0.10.2"],
    "tpu": ["jax[tpu]>=0.10.2"],
    # Compilers alone, for launch.plan: no driver, CUDA library or device is needed.
    "plan-tpu": ["jax[tpu]>=0.10.2"],
    "plan-gpu": ["jax-cuda13-plugin>=0.10.2", "jax-cuda13-pjrt>=0.10.2"],
    # The server has its own environment: third_party/sglang/install.sh. This is for machines
    # where stock SGLang and its CUDA torch share one environment with the trainer.
    "sglang": ["sglang==0.5.23"],
  },
)
