"""AlexNet and ResNet-18 on CIFAR-10, CIFAR-100, SVHN and STL-10, as the paper trains them: for a GPU.

300 epochs, batches of 200, Adam at 1e-3, normalised images, random crops and (but for SVHN) mirrored ones, 10 samples.
The rate falls by a cosine. The paper has it times 0.3 after every 10 epochs in all its experiments, which would leave
nothing of it for the last 200. ``run --device cuda:0`` for these.
"""

from benchmarks.paper.unit import Setting, Variant

_SGD = {"optimizer": "sgd", "lr": 0.05}

VARIANTS = {
    "vsd_t2": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2", "VSD"),
    "ard_vd": Variant("ard_vd", {}, "VD (ARD)", "VD"),
    "map": Variant("map", {}, "MAP", "MAP"),
    "mc_dropout": Variant("mc_dropout", {"rate": 0.1}, "MC dropout 0.1", "MCD"),
    "bbb_lrt": Variant("bbb_lrt", {}, "BBB, local reparameterisation", "BBB"),
    "elrg": Variant("elrg", {}, "ELRG", "ELRG"),
    "swag": Variant("swag", {"start": 200, "period": 1}, "SWAG", "SWAG", schedule="swag", lr=0.05),
    "deep_ensemble": Variant("deep_ensemble", {"num_members": 5}, "deep ensemble of 5", "D.E"),
    "vsd_t1": Variant("vsd", {"num_reflections": 1}, "VSD, T = 1"),
    "vsd_t2_sgd": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2, SGD with momentum", "VSD with SGD", **_SGD),
}
CLASSES = {"cifar10": 10, "cifar100": 100, "svhn": 10, "stl10": 10}
OOD = {"alexnet_cifar10": ("cifar100", "svhn"), "resnet18_cifar100": ("cifar10", "svhn")}


def _setting(network: str, data: str) -> Setting:
    task = f"{network}_{data}"
    size = {"image_size": 96} if (network, data) == ("alexnet", "stl10") else {}
    return Setting(
        task=task,
        data=data,
        ood=OOD.get(task, ()),
        network=network,
        network_options={"num_classes": CLASSES[data], **size},
        epochs=300,
        batch_size=200,
        lr=1e-3,
        num_samples=10,
        augment=True,
        flip=data != "svhn",
        normalize=True,
        variants=VARIANTS,
        seeds=(0, 1, 2, 3, 4),
    )


SETTINGS = [_setting(network, data) for network in ("alexnet", "resnet18") for data in CLASSES]
