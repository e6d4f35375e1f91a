"""`toolkit report`: what runs logged, as one page for a browser and as one picture.

runs    a run's folder, read      curves    what is drawn, as numbers
tables  what stands beside it     page      HTML with plotly      picture    PNG with matplotlib
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.report.writing import follow, write_report

import_when_used(__name__)
