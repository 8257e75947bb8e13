"""Fifteen ways to spoil a grey image: noise, blur, geometry, weather and drawing over it.

    python -m benchmarks.corruptions --data FOLDER --out FILE.png   # all of them on MNIST; without a folder, on digits

``corrupted(images, name)`` takes ``(N, H, W)`` with values in [0, 1] and gives the same shape and range. Each has one
strength, at which most MNIST images can still be read. Lengths are shares of the image's side, so that 8 × 8 works as
well as 28 × 28. Every image has a draw of its own; draws come from the seed and the name, on the CPU, so that the same
images are spoilt in the same way for every method. ``tests/benchmarks/test_corruptions.py`` has checksums.
"""

import argparse
import math
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["CORRUPTIONS", "corrupted"]

Corruption = Callable[[Tensor, Generator], Tensor]
#: the fifteen, by name
CORRUPTIONS: dict[str, Corruption] = {}


def corruption(function: Corruption) -> Corruption:
    CORRUPTIONS[function.__name__.replace("_", " ")] = function
    return function


def corrupted(images: Tensor, name: str, seed: int = 0) -> Tensor:
    """The images with one of the corruptions."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return CORRUPTIONS[name](images, generator).clamp(0, 1)


# ---- helpers


def uniform(generator: Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def signs(generator: Generator, count: int) -> Tensor:
    return 2.0 * torch.randint(2, (count,), generator=generator) - 1


def warped(x: Tensor, matrices: Tensor, shifts: Tensor) -> Tensor:
    """Output pixels at p show the input at ``M p + t``, where positions go from −1 to 1; black outside."""
    theta = torch.cat([matrices, shifts.unsqueeze(-1)], -1).to(x.dtype)
    grid = F.affine_grid(theta, [len(x), 1, *x.shape[1:]], align_corners=False)
    return F.grid_sample(x.unsqueeze(1), grid, align_corners=False).squeeze(1)


def turns(angles: Tensor) -> Tensor:
    """Matrices of rotations, ``(N, 2, 2)``."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur; sigma in pixels."""
    reach = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square()).to(x.dtype)
    kernel = kernel / kernel.sum()
    padded = F.pad(x.unsqueeze(1), (reach,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1)).squeeze(1)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of pixel centres, from −1 to 1, ``(H, 1)`` and ``(1, W)``."""
    height, width = x.shape[1:]
    down = (2 * torch.arange(height) + 1) / height - 1
    right = (2 * torch.arange(width) + 1) / width - 1
    return down.unsqueeze(1), right.unsqueeze(0)


def ink(distance: Tensor, x: Tensor, width: float = 1.0) -> Tensor:
    """White where the distance to a line is below half its width in pixels, with a soft edge."""
    pixels = distance * x.shape[-1] / 2
    return (0.5 + 0.5 * width - pixels).clamp(0, 1)


# ---- noise and blur


@corruption
def shot_noise(x: Tensor, generator: Generator) -> Tensor:
    """Few photons: a Poisson number, five on average where the image is white."""
    return torch.poisson(5 * x, generator=generator) / 5


@corruption
def impulse_noise(x: Tensor, generator: Generator) -> Tensor:
    """A fifth of the pixels black or white."""
    hit = torch.rand(x.shape, generator=generator) < 0.2
    return torch.where(hit, torch.randint(2, x.shape, generator=generator).to(x.dtype), x)


@corruption
def glass_blur(x: Tensor, generator: Generator) -> Tensor:
    """Each pixel shows a random one of its surroundings, then a slight blur."""
    height, width = x.shape[1:]
    reach = max(1, round(0.08 * height))
    index = torch.arange(height * width).view(height, width)
    down, right = (torch.randint(-reach, reach + 1, x.shape, generator=generator) for _ in range(2))
    down = (index // width + down).clamp(0, height - 1)
    right = (index % width + right).clamp(0, width - 1)
    return blurred(x.flatten(1).gather(1, (down * width + right).flatten(1)).view_as(x), 0.5)


@corruption
def motion_blur(x: Tensor, generator: Generator) -> Tensor:
    """The mean along a line of a fifth of the side, in a random direction."""
    angle = uniform(generator, 0, math.pi, len(x))
    way = torch.stack([angle.cos(), angle.sin()], -1)
    same = torch.eye(2).expand(len(x), 2, 2)
    return torch.stack([warped(x, same, step * way) for step in torch.linspace(-0.2, 0.2, 7)]).mean(0)


# ---- geometry


@corruption
def shear(x: Tensor, generator: Generator) -> Tensor:
    """Slanted to the left or to the right."""
    matrices = torch.eye(2).repeat(len(x), 1, 1)
    matrices[:, 0, 1] = signs(generator, len(x)) * uniform(generator, 0.5, 0.9, len(x))
    return warped(x, matrices, torch.zeros(len(x), 2))


@corruption
def scale(x: Tensor, generator: Generator) -> Tensor:
    """About half as large."""
    factor = uniform(generator, 1.6, 2.2, len(x)).view(-1, 1, 1)
    return warped(x, factor * torch.eye(2), torch.zeros(len(x), 2))


@corruption
def rotate(x: Tensor, generator: Generator) -> Tensor:
    """By 30 to 50 degrees, to either side."""
    angle = signs(generator, len(x)) * uniform(generator, math.radians(30), math.radians(50), len(x))
    return warped(x, turns(angle), torch.zeros(len(x), 2))


@corruption
def translate(x: Tensor, generator: Generator) -> Tensor:
    """Moved by 10 to 20 % of the side, across and down."""
    shifts = torch.stack([signs(generator, len(x)) * uniform(generator, 0.2, 0.4, len(x)) for _ in range(2)], -1)
    return warped(x, torch.eye(2).expand(len(x), 2, 2), shifts)


# ---- light and weather


@corruption
def brightness(x: Tensor, generator: Generator) -> Tensor:
    """Lighter by 0.3 to 0.6, the background too."""
    return x + uniform(generator, 0.3, 0.6, len(x)).view(-1, 1, 1)


@corruption
def fog(x: Tensor, generator: Generator) -> Tensor:
    """Clouds of several sizes in front of an image that has lost contrast."""
    clouds = torch.zeros_like(x)
    for cells in (2, 4, 8):
        coarse = torch.rand(len(x), 1, cells, cells, generator=generator, dtype=x.dtype)
        clouds += F.interpolate(coarse, x.shape[1:], mode="bilinear", align_corners=True).squeeze(1) * 2 / cells
    lowest, highest = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
    return 0.5 * x + 0.7 * (clouds - lowest) / (highest - lowest)


@corruption
def spatter(x: Tensor, generator: Generator) -> Tensor:
    """Grey drops on the lens: where blurred noise is in its highest tenth."""
    noise = blurred(torch.randn(x.shape, generator=generator, dtype=x.dtype), max(0.6, 0.05 * x.shape[-1]))
    edge = noise.flatten(1).quantile(0.9, dim=1).view(-1, 1, 1)
    spread = noise.flatten(1).std(dim=1).view(-1, 1, 1)
    drops = ((noise - edge) / (0.3 * spread)).clamp(0, 1)
    return x * (1 - drops) + 0.8 * drops


# ---- drawn over


@corruption
def stripe(x: Tensor, generator: Generator) -> Tensor:
    """Black and white change places in an upright band, a fifth of the side wide, near the middle."""
    _, right = positions(x)
    centre = uniform(generator, -0.3, 0.3, len(x), 1, 1)
    return torch.where((right - centre).abs() < 0.2, 1 - x, x)


@corruption
def dotted_line(x: Tensor, generator: Generator) -> Tensor:
    """A white dotted line from the left to the right edge."""
    down, right = positions(x)
    ends = uniform(generator, -0.8, 0.8, 2, len(x), 1, 1)
    height = ends[0] + (ends[1] - ends[0]) * (right + 1) / 2
    slope = (ends[1] - ends[0]) / 2
    line = ink((down - height).abs() / (1 + slope.square()).sqrt(), x, 1.5)
    step = 8 / x.shape[-1]  # two pixels on, two off
    gaps = ((right + 1) * (1 + slope.square()).sqrt() / step + uniform(generator, 0, 1, len(x), 1, 1)) % 1 < 0.5
    return torch.maximum(x, (line * gaps).to(x.dtype))


@corruption
def zigzag(x: Tensor, generator: Generator) -> Tensor:
    """A white zigzag line from the left to the right edge, turned at random."""
    down, right = positions(x)
    angle = uniform(generator, -0.5, 0.5, len(x), 1, 1)
    along, across = angle.cos() * right + angle.sin() * down, angle.cos() * down - angle.sin() * right
    phase, level = uniform(generator, 0, 1, len(x), 1, 1), uniform(generator, -0.4, 0.4, len(x), 1, 1)
    height = 0.8 * ((2 * along + phase) % 1 - 0.5).abs() - 0.2  # of slope 1.6
    return torch.maximum(x, ink((across - level - height).abs() / math.hypot(1, 1.6), x, 1.5).to(x.dtype))


@corruption
def canny_edges(x: Tensor, generator: Generator) -> Tensor:
    """The outlines alone, after Canny: ridges of the gradient's length that are steep, or continue a steep one."""
    smooth = F.pad(blurred(x, 0.7).unsqueeze(1), (1,) * 4, mode="replicate")
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=x.dtype)
    right, down = F.conv2d(smooth, torch.stack([sobel, sobel.T]).unsqueeze(1)).unbind(1)
    length = torch.hypot(right, down)
    # the two neighbours along the gradient, which is rounded to one of eight directions
    sector = (torch.atan2(down, right) / (math.pi / 4)).round().long() % 4
    around = F.pad(length, (1,) * 4)
    height, width = x.shape[1:]

    def neighbour(i: int, j: int) -> Tensor:
        return around[:, 1 + i : 1 + i + height, 1 + j : 1 + j + width]

    ridge = torch.zeros_like(x, dtype=torch.bool)
    for number, (i, j) in enumerate([(0, 1), (1, 1), (1, 0), (1, -1)]):
        ridge |= (sector == number) & (length >= neighbour(i, j)) & (length > neighbour(-i, -j))
    weak, found = ridge & (length > 0.6), ridge & (length > 1.4)
    for _ in range(height):
        found = weak & (F.max_pool2d(found.to(x.dtype).unsqueeze(1), 3, 1, 1).squeeze(1) > 0)
    return found.to(x.dtype)


# ---- a picture of all


def main() -> None:
    import matplotlib.pyplot as plt

    import pyro_vsd as vsd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with MNIST; digits without it")
    parser.add_argument("--out", default="corruptions.png")
    options = parser.parse_args()
    test = (vsd.datasets.mnist(options.data) if options.data else vsd.datasets.digits())[1]
    images = test.x[:6].reshape(6, *((28, 28) if options.data else (8, 8)))
    rows = {"as they are": images} | {name: corrupted(images, name) for name in CORRUPTIONS}
    figure, axes = plt.subplots(4, 4, figsize=(11, 6.4), layout="constrained")
    for axis, (name, some) in zip(axes.flat, rows.items(), strict=True):
        axis.imshow(torch.cat([torch.cat(list(part), 1) for part in some.split(3)]), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name, fontsize=9)
        axis.axis("off")
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
