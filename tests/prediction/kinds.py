"""Predictions of every kind, at random."""

import torch
from torch.distributions import Poisson

from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction


def poisson(num_samples=3, num_rows=4):
    rate = torch.rand(num_samples, num_rows) + 0.5
    variance = rate.mean(0) + rate.var(0, correction=0)
    return Prediction(rate.mean(0), variance, num_samples, samples=rate, components=Poisson(rate)), rate


def classes(num_samples=5, num_rows=7, num_classes=3):
    return ClassificationPrediction.from_samples(torch.randn(num_samples, num_rows, num_classes).softmax(-1))


def gaussians(*shape):
    return RegressionPrediction.from_samples(torch.randn(shape), torch.rand(shape) + 0.1)
