"""The small digits that come with the install: a quick try of the runner, no table is made of it."""

from benchmarks.paper.unit import Setting, Variant

VARIANTS = {
    "vsd_t2": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2"),
    "ard_vd": Variant("ard_vd", {}, "VD (ARD)"),
    "map": Variant("map", {}, "MAP"),
    "swag": Variant("swag", {"start": 2, "period": 0.5}, "SWAG", schedule="swag", lr=0.05),
}

SETTINGS = [
    Setting(
        task="digits",
        data="digits",
        network="mlp",
        network_options={"sizes": [64, 50, 10]},
        num_validation=200,
        epochs=4,
        batch_size=50,
        lr=1e-2,
        num_samples=20,
        variants=VARIANTS,
        seeds=(0,),
    )
]
