"""Names of Pyro and torch with an underscore, which may move in any release: all that are used, each still there.

Elsewhere examples broke with each release of Pyro, since private helpers had moved (karalets/TyXe#2, TyXe#18).

The list below is exact: a new use fails here until it is written down with the thing it belongs to, and a use that is
gone until it is crossed out. Where there is a public name, take that.
"""

import ast
import importlib
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.poutine.messenger import Messenger
from torch import nn

import pyro_vsd

PACKAGE = Path(pyro_vsd.__file__).parent


def parameter():
    return torch.zeros(1, requires_grad=True)


def module():
    return nn.Linear(1, 1)


def law():
    return dist.Normal(0.0, 1.0)


def transform():
    return torch.distributions.ExpTransform()


def elbo():
    return pyro.infer.Trace_ELBO()


def autoguide():
    guide = AutoNormal(lambda: pyro.sample("x", dist.Normal(0.0, 1.0)))
    guide()
    return guide


def pyro_module():
    return pyro.nn.PyroModule("name")


def pyro_optimizer():
    return pyro.optim.Adam({"lr": 0.1})


def schedulers():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])


def stepped_optimizer():
    """One that has been stepped under a scheduler, which warns where it thinks that it has not."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    return optimizer


def trace():
    """Nodes of a trace by name."""
    return type("Nodes", (), dict(pyro.poutine.trace(lambda x: x).get_trace(1).nodes))


def coupling():
    made = dist.transforms.affine_coupling(2, [3])
    made(torch.zeros(2))
    return made


def state_of_a_module():
    class Extra(nn.Module):
        def get_extra_state(self):
            return 1

    return type("State", (), dict(Extra().state_dict()))


#: Every private name in use, and what it is a name of.
NAMES = {
    "_INPUT": trace,
    "_C": lambda: torch,
    "_backward_hooks": parameter,
    "_batch_shape": law,
    "_buffers": module,
    "_cached_log_scale": coupling,
    "_cached_x_y": coupling,
    "_call": transform,
    "_conv_forward": lambda: nn.Conv2d(1, 1, 1),
    "_create_function_from_graph": lambda: torch._C,
    "_create_graph_by_tracing": lambda: torch._C,
    "_create_plates": autoguide,
    "_dispatch": lambda: torch,
    "_extended_shape": law,
    "_extra_state": state_of_a_module,
    "_forward_hooks": module,
    "_forward_pre_hooks": module,
    "_get_checked_instance": law,
    "_get_grad_clip": pyro_optimizer,
    "_get_optim": pyro_optimizer,
    "_get_trace": elbo,
    "_get_traces": elbo,
    "_get_vectorized_trace": elbo,
    "_getframe": lambda: sys,
    "_guess_max_plate_nesting": elbo,
    "_inductor": lambda: importlib.import_module("torch._inductor.compile_fx") and torch,
    "_inverse": transform,
    "_load_from_state_dict": module,
    "_load_state_dict": lambda: pyro.optim.optim,
    "_make_wrapper_subclass": lambda: torch.Tensor,
    "_model": autoguide,
    "_modules": module,
    "_non_persistent_buffers_set": module,
    "_opt_called": stepped_optimizer,
    "_orig_mod": lambda: torch.compile(module()),
    "_parameters": module,
    "_prototype_frames": autoguide,
    "_pyro_context": pyro_module,
    "_pyro_name": pyro_module,
    "_pyro_samples": pyro_module,
    "_pyro_set_supermodule": pyro_module,
    "_pytree": lambda: torch.utils,
    "_schedulers": schedulers,
    "_setup_prototype": autoguide,
    "_state_waiting_to_be_consumed": pyro_optimizer,
    "_unsafe_view": lambda: torch.ops.aten,
    "_validate_args": law,
    "_validate_sample": law,
}
#: Methods of a ``Messenger`` that Pyro calls by name.
HOOKS = {"_pyro_param", "_pyro_post_sample", "_pyro_sample"}
#: Parts of names of ours, names of NumPy and the standard library, and one of ours that a tensor has as well.
OTHERS = {"_asdict", "_codecs", "_core", "_pyro_", "_reconstruct", "_replace"}
OTHERS |= {"_shared_weights", "_unconstrained", "_values", "_z"}


def private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_" and name.isidentifier()


def read(tree):
    """Private names that a source uses as attributes, methods, imports or strings; and those that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
            own = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
            if own and node.value.id in ("self", "new", "cls", "detached", "fresh", "mean", "value"):
                defined.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("pyro", "torch"):
            used |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.ClassDef):
            defined.add(node.name)
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    used.add(part.name)
                    defined.add(part.name)
                elif isinstance(part, (ast.Assign, ast.AnnAssign)):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set(filter(private, used)), set(filter(private, defined))


def foreign_names():
    """Private names in the package that something of Pyro or torch has, or that nothing of ours defines."""
    # in figures a label with an underscore is one that no legend shows
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "plots"]
    pairs = [read(ast.parse(path.read_text(encoding="utf-8"))) for path in sources]
    used, defined = set().union(*(u for u, _ in pairs)), set().union(*(d for _, d in pairs))
    things = [make() for make in (module, law, transform, elbo, autoguide, pyro_module, pyro_optimizer, schedulers)]
    things += [torch.zeros(1), stepped_optimizer(), Messenger()]
    known = {name for name in used if any(hasattr(thing, name) for thing in things)}
    return known | (used - defined) | {name for name in used if name.startswith("_pyro_")}


def test_the_list_is_exact():
    found = foreign_names() - OTHERS
    assert sorted(found - set(NAMES) - HOOKS) == [], "a new private name: is there a public one? Else write it down"
    assert sorted((set(NAMES) | HOOKS) - found) == [], "no longer used: cross it out"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_name_is_still_there(name):
    assert hasattr(NAMES[name](), name)


@pytest.mark.parametrize("name", ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"])
def test_trees_are_still_there(name):
    assert callable(getattr(torch.utils._pytree, name))


def test_subclasses_can_still_be_switched_off():
    assert hasattr(torch._C, "DisableTorchFunctionSubclass")


@pytest.mark.parametrize("name", ["used", "active"])
def test_the_context_of_pyros_modules_is_as_it_was(name):
    assert hasattr(pyro_module()._pyro_context, name)


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_pyro_still_calls_its_hooks(hook):
    called = []
    watcher = type("Watcher", (Messenger,), {hook: lambda self, message: called.append(message["name"])})
    with watcher():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.param("p", torch.zeros(1))
    assert called == ["p" if hook == "_pyro_param" else "x"]


@pytest.mark.parametrize("source", ["x._new_name", "from torch._new_name import f", "getattr(x, '_new_name')"])
def test_the_check_sees_a_new_name(source):
    used, defined = read(ast.parse(source))
    assert "_new_name" in used - defined
