"""`toolkit report`: what runs logged, as one page for a browser and as one picture.

runs    a run's folder, read      curves    what is drawn, as numbers
tables  what stands beside it     page      HTML with plotly      picture    PNG with matplotlib
"""

from toolkit.report.writing import follow, write_report
