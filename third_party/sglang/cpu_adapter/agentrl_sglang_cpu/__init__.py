"""Declares torchvision's two operators just before torchvision is imported, so that the import
succeeds.

Python runs this at start-up through a .pth file. torchvision's Python side registers fake kernels
for `nms` and `qnms`, which its compiled library defines; against a CPU build of torch that library
may not load, and then the import fails although no text model calls either operator.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(MetaPathFinder):
  """Finds nothing itself: runs once, when torchvision is first looked for, and then leaves."""

  library = None  # torch forgets the operators when this object is collected

  def find_spec(self, fullname, path=None, target=None):
    if fullname != "torchvision":
      return None
    sys.meta_path.remove(self)
    spec = PathFinder.find_spec(fullname, path, target)
    if spec is not None:
      import torch

      _DeclareOperators.library = torch.library.Library("torchvision", "FRAGMENT")
      for name in ("nms", "qnms"):
        _DeclareOperators.library.define(name + _SCHEMA)
    return spec


sys.meta_path.insert(0, _DeclareOperators())
