"""Plan a run before it starts: its memory, traffic, time and disk. No weights, no device."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.planning.devices import device_of
    from toolkit.planning.measuring import calibrate_by_run, calibrate_here
    from toolkit.planning.preflight import resolve_auto
    from toolkit.planning.published import with_known_shape
    from toolkit.planning.report import plan_run

import_when_used(__name__)
