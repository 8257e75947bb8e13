"""MNIST as rows of pixels, two fully connected networks; FashionMNIST as OOD inputs. And the ablations.

The paper trains for 100 epochs and predicts with 100 samples; here 15 epochs with a cosine and 50 samples, which a CPU
can do, and single runs of 100 epochs.
"""

from benchmarks.paper.unit import Setting, Variant

_RATES = {"rate": ("linear", 0.05, 0.6), "input_rate": ("linear", 0.0, 0.3)}
_NOISE = {"kl_weight": ("log", 0.1, 10.0), "init_alpha": ("log", 0.05, 1.0)}

VARIANTS = {
    "vsd_t2": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2", "VSD"),
    "ard_vd": Variant("ard_vd", {}, "VD (ARD: VSD with T = 0)", "VD"),
    "map": Variant("map", {}, "MAP", "MAP"),
    "vsd_t1": Variant("vsd", {"num_reflections": 1}, "VSD, T = 1", "VSD"),
    "vsd_t3": Variant("vsd", {"num_reflections": 3}, "VSD, T = 3", "VSD"),
    "vsd_t8": Variant("vsd", {"num_reflections": 8}, "VSD, T = 8", "VSD"),
    "bbb_lrt": Variant("bbb_lrt", {}, "BBB, local reparameterisation", "BBB"),
    "deep_ensemble": Variant("deep_ensemble", {"num_members": 5}, "deep ensemble of 5", "D.E"),
}
# Searches with trials of 6 epochs: tune --epochs 6. They favour weak noise, see the page.
SHORT = {
    "swag": Variant(
        "swag",
        {"start": 10, "period": 0.25},
        "SWAG, rate by short search",
        "SWAG",
        schedule="swag",
        tuned={"lr": ("log", 0.01, 0.3)},
    ),
    "mc_dropout": Variant("mc_dropout", {}, "MC dropout, p by short search", "MCD", tuned=_RATES),
    "vsd_t2_tuned": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2, λ, α₀ by short search", "VSD", tuned=_NOISE),
}
# Searches with trials as long as the training: tune --epochs 15. The same number of trials for all.
FULL = {
    "mc_dropout_full": Variant("mc_dropout", {}, "MC dropout, p by full search", "MCD", tuned=_RATES),
    "ard_vd_full": Variant("ard_vd", {}, "VD (ARD), λ, α₀ by full search", "VD", tuned=_NOISE),
    "vsd_t2_full": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2, λ, α₀ by full search", "VSD", tuned=_NOISE),
    "bbb_lrt_full": Variant(
        "bbb_lrt",
        {},
        "BBB, local reparameterisation, λ, σ by full search",
        "BBB",
        tuned={"kl_weight": ("log", 0.01, 1.0), "prior_scale": ("log", 0.05, 1.0)},
    ),
    "map_full": Variant("map", {}, "MAP, σ by full search", "MAP", tuned={"prior_scale": ("log", 0.03, 3.0)}),
    "swag_full": Variant(
        "swag",
        {"start": 10, "period": 0.25},
        "SWAG, rate and scale by full search",
        "SWAG",
        schedule="swag",
        tuned={"lr": ("log", 0.01, 0.3), "scale": ("log", 0.3, 3.0)},
    ),
}
# As long as the paper's: does the time of training explain what differs? A longer training overfits more and asks for
# more noise, so three λ, of which the validation rows choose. The paper's schedule once.
LONG = {
    "vsd_t2_e100": Variant(
        "vsd", {"num_reflections": 2}, "VSD, T = 2, λ = 1, 100 epochs", "VSD", epochs=100, seeds=(0,)
    ),
    **{
        f"vsd_t2_e100_l{weight}": Variant(
            "vsd",
            {"num_reflections": 2, "kl_weight": float(weight)},
            f"VSD, T = 2, λ = {weight}, 100 epochs",
            "VSD",
            epochs=100,
        )
        for weight in (3, 10)
    },
    "vsd_t8_e100_l10": Variant(
        "vsd", {"num_reflections": 8, "kl_weight": 10.0}, "VSD, T = 8, λ = 10, 100 epochs", "VSD", epochs=100
    ),
    "vsd_t2_e100_steps": Variant(
        "vsd",
        {"num_reflections": 2, "kl_weight": 10.0},
        "VSD, T = 2, λ = 10, 100 epochs, the paper's schedule",
        "VSD",
        schedule="steps",
        epochs=100,
        seeds=(0,),
    ),
    "ard_vd_e100": Variant("ard_vd", {}, "VD, λ = 1, 100 epochs", "VD", epochs=100, seeds=(0,)),
    **{
        f"ard_vd_e100_l{weight}": Variant(
            "ard_vd", {"kl_weight": float(weight)}, f"VD, λ = {weight}, 100 epochs", "VD", epochs=100
        )
        for weight in (3, 10)
    },
    "map_e100": Variant("map", {}, "MAP, 100 epochs", "MAP", epochs=100, seeds=(0,)),
    "mc_dropout_e100": Variant(
        "mc_dropout",
        {"rate": 0.5, "input_rate": 0.2},
        "MC dropout, p = 0.5, 0.2 on inputs, 100 epochs",
        "MCD",
        epochs=100,
        seeds=(0,),
    ),
}
# Noise variances that learn faster than the weights: they lag behind their best values, and more so with a rotation.
FAST = {
    f"{name}_alpha{factor}": Variant(
        method,
        options,
        f"{label}, noise variances {factor} times as fast",
        rates={"log_alpha": factor * 1e-3},
    )
    for factor in (5, 20)
    for name, method, options, label in (
        ("vsd_t2", "vsd", {"num_reflections": 2}, "VSD, T = 2"),
        ("ard_vd", "ard_vd", {}, "VD"),
    )
}
# The paper tunes SWAG's weight decay, 1 / (N σ²) of the loss per row, among 1e-4 to 5e-3, at a rate of 5e-2.
DECAY = {
    f"swag_decay{name}": Variant(
        "swag",
        {"start": 10, "period": 0.25, "prior_scale": scale},
        f"SWAG, rate 0.05, weight decay {name}",
        "SWAG",
        schedule="swag",
        lr=0.05,
    )
    for name, scale in (("0.0001", 0.447), ("0.0005", 0.2), ("0.001", 0.141))
}
ABLATIONS = {
    "free": Variant("vsd", {"num_reflections": 2}, "free vectors, T = 2", "full rank"),
    "rank2": Variant("vsd_low_rank", {"num_reflections": 2, "rank": 2}, "low rank, r = 2", "r = 2"),
    "rank5": Variant("vsd_low_rank", {"num_reflections": 2, "rank": 5}, "low rank, r = 5", "r = 5"),
    "rank10": Variant("vsd_low_rank", {"num_reflections": 2, "rank": 10}, "low rank, r = 10", "r = 10"),
    "ard_vd": Variant("ard_vd", {}, "VD (ARD)"),
    "vsd_hierarchical": Variant("vsd_hierarchical", {"num_reflections": 2}, "VSD, T = 2, hierarchical prior"),
    "ard_vd_hierarchical": Variant("ard_vd_hierarchical", {}, "VD (ARD), hierarchical prior"),
    "sgd": Variant("vsd", {"num_reflections": 2}, "VSD, T = 2, SGD with momentum", optimizer="sgd", lr=0.05),
    "ard_vd_sgd": Variant("ard_vd", {}, "VD (ARD), SGD with momentum", optimizer="sgd", lr=0.05),
    "per_weight": Variant(
        "vsd", {"num_reflections": 2, "kl_scale": "weight", "kl_weight": 1.0}, "VSD, KL per weight (factor Q), λ = 1"
    ),
    "per_weight_small": Variant(
        "vsd",
        {"num_reflections": 2, "kl_scale": "weight", "kl_weight": 0.001},
        "VSD, KL per weight (factor Q), λ = 0.001",
    ),
    "t20": Variant("vsd", {"num_reflections": 20}, "VSD, T = 20"),
}


def mnist_setting(
    task: str, sizes: list[int], variants: dict[str, Variant], num_validation: int = 10_000, **options: object
) -> Setting:
    return Setting(
        task=task,
        data="mnist",
        ood=("fashion_mnist",),
        flatten=True,
        num_validation=num_validation,
        network="mlp",
        network_options={"sizes": sizes},
        batch_size=100,
        lr=1e-3,
        num_samples=50,
        variants=variants,
        **options,  # type: ignore[arg-type]
    )


# Rates as chosen on FC 400×2.
WIDE = VARIANTS | {name: SHORT[name] for name in ("swag", "mc_dropout")}
# All 60,000 rows, nothing held out: is it the rows that differ from the paper? λ = 10 is the validation rows' choice.
ALL_ROWS = {name: (VARIANTS | LONG)[name] for name in ("vsd_t2", "ard_vd", "map", "vsd_t2_e100_l10", "ard_vd_e100_l10")}
SETTINGS = [
    mnist_setting("mnist_400x2", [784, 400, 400, 10], VARIANTS | SHORT | DECAY | FULL | LONG | FAST, epochs=15),
    mnist_setting("mnist_400x2_60k", [784, 400, 400, 10], ALL_ROWS, num_validation=0, epochs=15),
    mnist_setting("mnist_ablation", [784, 400, 400, 10], ABLATIONS, epochs=10, seeds=(0, 1)),
    mnist_setting("mnist_750x3", [784, 750, 750, 750, 10], WIDE, epochs=15, tuned_as="mnist_400x2"),
]
