"""½‖φ − θ‖²_λ with λ = exp(ρ) and ρ meta-learned: λ stays positive whatever an optimizer does to
ρ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from metanudge.names import check_known
from metanudge.params import Params, combined, dot, wide
from metanudge.proximal.base import Diagonal, Force, multiply_by
from metanudge.proximal.stiffness import Stiffness, stiffness_per_parameter
from metanudge.spread import is_spread

Per = Literal["scalar", "tensor", "parameter"]
ALL = "all"


class LogStiffness(nn.Module):
    """ρ = log λ: one for all parameters, or one (of one entry, or of one per parameter) under the
    name of each.

    Args:
        lam: what λ is at the start.
        per: `"scalar"`, `"tensor"` or `"parameter"`.
        parameters: those that adapt.
    """

    def __init__(self, lam: Stiffness, per: Per, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        check_known("learn_lam", per, get_args(Per), "; leave it out for a fixed λ")
        if callable(lam) and not isinstance(lam, (Tensor, Mapping)):
            raise ValueError(
                f"learn_lam={per!r} learns numbers, but lam is an operator. Give a number or a"
                " mapping for lam, or leave learn_lam out."
            )
        if per == "parameter" and any(map(is_spread, parameters.values())):
            raise ValueError(
                'learn_lam="parameter" is not served where the parameters are sharded over several'
                ' ranks. Use learn_lam="tensor" or "scalar".'
            )
        start = stiffness_per_parameter(lam, parameters)
        self._per: Per = per
        if per == "scalar":
            if isinstance(lam, Mapping):
                raise ValueError(
                    'lam has one value per parameter name, but learn_lam="scalar" learns one for'
                    ' all. Use learn_lam="tensor", or start from one number.'
                )
            self.register_parameter(ALL, nn.Parameter(next(iter(start.values())).log()))
            return
        for name, value in start.items():
            if per == "tensor" and value.ndim > 0:
                raise ValueError(
                    f'lam[{name!r}] has one value per parameter, but learn_lam="tensor" learns one'
                    ' per tensor. Use learn_lam="parameter", or start from numbers.'
                )
            like = value if per == "tensor" else parameters[name]
            rho = torch.ones_like(like, dtype=value.dtype) * value.log()
            register(self, name, nn.Parameter(rho))


class Learned(Diagonal):
    """R = ½ Σ λ d² with λ = exp(ρ).

    The tensors in `lam` keep their storage; `refresh` writes exp(ρ) into them, on the device.
    """

    def __init__(self, log_lam: LogStiffness, parameters: Mapping[str, Tensor]) -> None:
        self._log_lam = log_lam
        self._keys = _keys(log_lam, parameters)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        lam: Params = {}
        rho = self._rho
        for name, p in parameters.items():
            key, dtype = self._keys[name], wide(p.dtype)
            if (key, dtype) not in self._buffers:
                buffer = torch.empty_like(rho[key], dtype=dtype, device=p.device)
                self._buffers[key, dtype] = buffer
            lam[name] = self._buffers[key, dtype]
        self._smallest = lam[next(iter(lam))].new_empty(())
        super().__init__(lam, self._smallest)
        self.refresh()

    @property
    def _rho(self) -> dict[str, nn.Parameter]:
        return {f"log_lam.{key}": p for key, p in self._log_lam.named_parameters()}

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """ρ, as `log_lam.…`, where it requires grad."""
        return {key: p for key, p in self._rho.items() if p.requires_grad}

    def refresh(self) -> None:
        """λ ← exp(ρ)."""
        rho = self._rho
        with torch.no_grad():
            for (key, dtype), buffer in self._buffers.items():
                torch.exp(rho[key].to(buffer.device, dtype), out=buffer)
            self._smallest.copy_(_least(self.lam))

    def accumulate(
        self, gradient: Params, a: Params, b: Params, weights: Sequence[float], scale: Params | None
    ) -> None:
        """gradient += Σ_r w_r λ a_r b_r, summed over the parameters that share a λ."""
        scale = self.lam if scale is None else scale
        for name, key in self._keys.items():
            if (target := gradient.get(key)) is not None:
                _add_products(name, target, a[name], b[name], weights, scale[name])

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ exp(ρ) d."""
        rho = {key: p.detach() for key, p in self._rho.items()} | learned
        lam = {n: rho[key].to(self.lam[n]).exp() for n, key in self._keys.items()}
        return multiply_by(lam), _least(lam)


def _keys(log_lam: LogStiffness, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Which ρ belongs to each of the model's parameters."""
    if log_lam._per == "scalar":
        return dict.fromkeys(parameters, f"log_lam.{ALL}")
    known = dict(log_lam.named_parameters())
    missing = [name for name in parameters if name not in known]
    if missing:
        raise ValueError(
            f"No stiffness is learned for {', '.join(missing)}, which did not adapt when the"
            " learner was made. Make a new MetaLearner."
        )
    return {name: f"log_lam.{name}" for name in parameters}


def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter under its dotted name, so that `state_dict` spells it like the model's."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _least(lam: Params) -> Tensor:
    values = list({id(value): value for value in lam.values()}.values())
    return torch.stack([value.min().to(values[0]) for value in values]).min()


def _add_products(
    name: str, target: Tensor, a: Tensor, b: Tensor, weights: Sequence[float], factor: Tensor
) -> None:
    """target += factor Σ_r w_r a_r b_r, summed over a whole tensor where the target has one entry
    for it.
    """
    with torch.no_grad():
        # the in-place engine: no temporary but one of the size of a tensor
        if target.shape == a.shape[1:] and a.shape[0] == 1:
            target.addcmul_((a[0] * factor).to(target), b[0].to(target), value=weights[0])
            return
        products = a * b if target.shape == a.shape[1:] else dot({name: a}, {name: b})
        target.addcmul_(combined(products, weights).to(target), factor.to(target))
