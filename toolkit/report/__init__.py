"""`toolkit report`: show what runs logged, as one HTML page and as one picture.

runs    read a run's folder             curves   the panels, as numbers
tables  the tables next to the curves   page     HTML with plotly
picture PNG with matplotlib             writing  both files
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.report.writing import follow, write_report

import_when_used(__name__)
