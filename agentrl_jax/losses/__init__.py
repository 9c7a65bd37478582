"""Losses as compositions of five slots: advantage, ratio, surrogate, penalty, weight."""
