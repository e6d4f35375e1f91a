"""Gathering ahead: the order in which units run, recorded, and the prefetches made from it.

Definition does not tell the order: layers may run several times, be skipped, or interleave two
stacks, and a wrong order costs all-gathers and memory without a word. So the order is the one of
the first forward. A unit that runs more than once in a forward is left out: it has no one next.
"""

from typing import Any

from torch import nn

from toolkit.config.settings import ShardingConfig


class Prefetch:
    """Records the order in which units run in the first forward of `root`, then wires prefetches.

    `units`: name -> modules of all units but the root.
    """

    def __init__(self, root: nn.Module, units: dict[str, list[nn.Module]], cfg: ShardingConfig):
        self._root, self._units = root, units
        self._depths = cfg.forward_prefetch, cfg.backward_prefetch
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.wired: dict[str, tuple[list[str], list[str]]] = {}
        """Unit -> those it gathers ahead in the forward, and in the backward."""
        self._handles = [
            root.register_forward_pre_hook(self._begin),
            root.register_forward_hook(self._finish),
        ]
        for name, modules in units.items():
            begin = modules[0].register_forward_pre_hook(lambda *_, n=name: self.begun.append(n))
            end = modules[-1].register_forward_hook(lambda *_, n=name: self.ended.append(n))
            self._handles += [begin, end]

    def _begin(self, *_: Any) -> None:
        self.begun.clear()  # an earlier forward may have ended in an error
        self.ended.clear()

    def _finish(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._wire(_once(self.begun), _once(self.ended))

    def _wire(self, begun: list[str], ended: list[str]) -> None:
        """Tell each unit what to gather ahead. The root's own is the first of either order."""
        forward, backward = self._depths
        begun, back = ["", *begun], ["", *reversed(ended)]
        ahead = {name: begun[i + 1 : i + 1 + forward] for i, name in enumerate(begun)}
        behind = {name: back[i + 1 : i + 1 + backward] for i, name in enumerate(back)}
        for name in ahead:
            unit: Any = self._units[name][0] if name else self._root
            if forward:
                unit.set_modules_to_forward_prefetch([self._units[n][0] for n in ahead[name]])
            if backward:
                unit.set_modules_to_backward_prefetch([self._units[n][0] for n in behind[name]])
            self.wired[name] = ahead[name], behind.get(name, [])


def _once(order: list[str]) -> list[str]:
    return [name for name in order if order.count(name) == 1]
