"""The life of a run on this machine's CPU, before the run: `toolkit rehearse`.

rehearse   runs the stages in order         stages    what a stage reports, and why one failed
preflight  the stages before training       life      train, kill, resume, export, read back
shrunk     the scaled-down model            rows      the first rows of the data
settings   the config, changed for a CPU    launches  processes, and the causes in their logs
reader     reads the export as users do, without the toolkit
"""

from toolkit.rehearsal.rehearse import rehearse
from toolkit.rehearsal.stages import Result
