"""The numbers of the paper's tables (Nguyen et al., 2021): means over five seeds. Rows and columns as printed there."""

__all__ = ["CLASSIFICATION", "DETECTION", "LOW_RANK", "NORMS", "find"]

#: NLL, error in per cent, ECE; by task and row. AlexNet and ResNet-18 are printed as accuracies there.
CLASSIFICATION: dict[str, dict[str, tuple[float | None, float | None, float | None]]] = {
    "mnist_400x2": {
        "MAP": (0.098, 1.32, 0.011),
        "BBB": (0.109, 1.59, 0.011),
        "MCD": (0.049, 1.26, 0.007),
        "VD": (0.051, 1.21, 0.007),
        "ELRG": (0.053, 1.54, None),
        "VSD": (0.042, 1.08, 0.006),
        "D.E": (0.057, 1.29, 0.009),
        "SWAG": (0.044, 1.27, 0.008),
    },
    "mnist_750x3": {
        "MAP": (0.109, 1.27, 0.011),
        "BBB": (0.140, 1.50, 0.013),
        "MCD": (0.057, 1.22, 0.007),
        "VD": (0.061, 1.17, 0.008),
        "VSD": (0.048, 1.09, 0.006),
        "D.E": (0.063, 1.21, 0.009),
        "SWAG": (0.043, 1.25, 0.007),
    },
    "cifar10_convnet": {
        "MAP": (2.847, 34.04, 0.272),
        "BBB": (1.202, 30.11, 0.098),
        "MCD": (0.794, 26.91, 0.024),
        "VD": (1.176, 27.45, 0.156),
        "ELRG": (0.871, 29.43, None),
        "VSD": (0.730, 24.92, 0.020),
        "D.E": (1.815, 26.44, 0.042),
        "SWAG": (0.799, 26.94, 0.012),
    },
    "svhn_convnet": {
        "MAP": (0.855, 12.26, 0.086),
        "BBB": (0.545, 10.57, 0.017),
        "MCD": (0.365, 9.23, 0.013),
        "VD": (0.534, 9.47, 0.055),
        "VSD": (0.299, 8.39, 0.008),
        "D.E": (0.783, 9.31, 0.070),
        "SWAG": (0.312, 8.42, 0.021),
    },
    "alexnet_cifar10": {
        "MAP": (1.038, 30.42, 0.121),
        "BBB": (0.994, 34.62, 0.062),
        "MCD": (0.717, 24.78, 0.023),
        "VD": (0.702, 22.72, 0.028),
        "ELRG": (0.723, 23.13, 0.065),
        "VSD": (0.656, 21.79, 0.046),
        "D.E": (0.872, 22.44, 0.115),
        "SWAG": (0.651, 21.86, 0.059),
        "VSD with SGD": (0.579, 19.59, 0.010),
    },
    "alexnet_cifar100": {
        "MAP": (4.705, 59.77, 0.393),
        "BBB": (2.659, 67.59, 0.049),
        "MCD": (2.503, 57.09, 0.151),
        "VD": (2.582, 56.90, 0.106),
        "ELRG": (2.368, 57.10, 0.099),
        "VSD": (2.241, 53.15, 0.112),
        "D.E": (3.402, 53.58, 0.314),
        "SWAG": (1.958, 50.19, 0.028),
        "VSD with SGD": (1.934, 48.32, 0.091),
    },
    "alexnet_svhn": {
        "MAP": (0.418, 12.44, 0.033),
        "BBB": (0.476, 12.70, 0.094),
        "MCD": (0.401, 11.97, 0.023),
        "VD": (0.327, 9.24, 0.010),
        "ELRG": (0.312, 9.34, 0.006),
        "VSD": (0.290, 8.38, 0.008),
        "D.E": (0.319, 9.70, 0.008),
        "SWAG": (0.331, 9.96, 0.031),
    },
    "alexnet_stl10": {
        "MAP": (2.532, 34.30, 0.267),
        "BBB": (1.707, 34.54, 0.222),
        "MCD": (1.059, 36.35, 0.052),
        "VD": (2.130, 34.52, 0.195),
        "ELRG": (1.088, 40.01, 0.018),
        "VSD": (1.019, 32.02, 0.079),
        "D.E": (2.229, 31.49, 0.241),
        "SWAG": (1.522, 31.59, 0.161),
    },
    "resnet18_cifar10": {
        "MAP": (0.644, 13.66, 0.093),
        "BBB": (0.697, 23.37, 0.071),
        "MCD": (0.534, 12.53, 0.084),
        "VD": (0.451, 12.32, 0.024),
        "ELRG": (0.382, 12.76, 0.018),
        "VSD": (0.464, 12.56, 0.061),
        "D.E": (0.488, 11.09, 0.069),
        "SWAG": (0.330, 11.23, 0.026),
        "VSD with SGD": (0.395, 12.83, 0.018),
    },
    "resnet18_cifar100": {
        "MAP": (2.410, 44.62, 0.243),
        "BBB": (2.239, 58.93, 0.100),
        "MCD": (2.121, 40.72, 0.227),
        "VD": (2.888, 43.20, 0.284),
        "ELRG": (1.634, 41.86, 0.096),
        "VSD": (1.504, 39.85, 0.116),
        "D.E": (1.913, 39.84, 0.203),
        "SWAG": (1.417, 37.55, 0.028),
        "VSD with SGD": (1.440, 39.67, 0.015),
    },
    "resnet18_svhn": {
        "MAP": (0.232, 4.68, 0.028),
        "BBB": (0.218, 5.47, 0.047),
        "MCD": (0.207, 4.22, 0.026),
        "VD": (0.164, 3.89, 0.017),
        "ELRG": (0.145, 3.97, 0.003),
        "VSD": (0.140, 3.59, 0.003),
        "D.E": (0.171, 3.64, 0.020),
        "SWAG": (0.130, 3.28, 0.016),
    },
    "resnet18_stl10": {
        "MAP": (1.401, 28.74, 0.199),
        "BBB": (1.290, 28.45, 0.179),
        "MCD": (1.333, 27.72, 0.188),
        "VD": (1.084, 26.71, 0.084),
        "ELRG": (0.811, 26.34, 0.080),
        "VSD": (0.769, 25.50, 0.083),
        "D.E": (1.197, 26.84, 0.177),
        "SWAG": (0.843, 26.85, 0.069),
    },
}
#: NLL, error, ECE of vectors from low-rank networks, T = 2, MNIST with FC 750×3, one seed
LOW_RANK = {
    "r = 2": (0.049, 1.12, 0.007),
    "r = 5": (0.046, 1.15, 0.006),
    "r = 10": (0.049, 1.15, 0.007),
    "full rank": (0.045, 1.13, 0.006),
}
#: spectral norm and stable rank of the last layer's weight, MLP on MNIST
NORMS = {"MAP": (1.47, 6.33), "MCD": (1.93, 4.36), "VD": (1.88, 5.28), "VSD": (2.05, 4.19)}
#: FPR at 95 % TPR, detection error, AUROC, AUPR in, AUPR out, by (task, OOD set)
DETECTION: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    ("alexnet_cifar10", "cifar100"): {
        "MAP": (0.88, 0.35, 0.70, 0.73, 0.65),
        "BBB": (0.93, 0.46, 0.55, 0.54, 0.54),
        "MCD": (0.91, 0.41, 0.63, 0.63, 0.60),
        "VD": (0.87, 0.35, 0.69, 0.72, 0.64),
        "VSD": (0.85, 0.33, 0.72, 0.76, 0.68),
    },
    ("alexnet_cifar10", "svhn"): {
        "MAP": (0.89, 0.33, 0.71, 0.59, 0.83),
        "BBB": (0.99, 0.45, 0.53, 0.33, 0.70),
        "MCD": (0.97, 0.39, 0.59, 0.47, 0.74),
        "VD": (0.89, 0.32, 0.72, 0.60, 0.83),
        "VSD": (0.91, 0.30, 0.73, 0.65, 0.83),
    },
    ("resnet18_cifar100", "cifar10"): {
        "MAP": (0.89, 0.37, 0.67, 0.70, 0.63),
        "BBB": (0.93, 0.41, 0.62, 0.66, 0.58),
        "MCD": (0.89, 0.37, 0.68, 0.71, 0.63),
        "VD": (0.90, 0.38, 0.66, 0.70, 0.62),
        "VSD": (0.87, 0.37, 0.69, 0.72, 0.65),
    },
    ("resnet18_cifar100", "svhn"): {
        "MAP": (0.91, 0.36, 0.68, 0.56, 0.81),
        "BBB": (0.89, 0.37, 0.68, 0.51, 0.82),
        "MCD": (0.89, 0.34, 0.71, 0.58, 0.83),
        "VD": (0.87, 0.34, 0.70, 0.58, 0.83),
        "VSD": (0.83, 0.31, 0.76, 0.65, 0.86),
    },
}


def find(table: dict[str, tuple[float | None, ...]], row: str | None, column: int) -> float | None:
    """A number, or none where the paper has none."""
    return table[row][column] if row in table else None


# the paper's rows stand beside both: it does not tell whether the held-out rows were added in the end
CLASSIFICATION["mnist_400x2_60k"] = CLASSIFICATION["mnist_400x2"]
# here with fewer epochs; of LeNet-5 the paper has figures alone
CLASSIFICATION["alexnet_cifar10_short"] = CLASSIFICATION["alexnet_cifar10"]
CLASSIFICATION["lenet5_cifar10_short"] = {}
DETECTION["alexnet_cifar10_short", "cifar100"] = DETECTION["alexnet_cifar10", "cifar100"]
