"""The whole life of a run on this machine's CPU, before the run: `toolkit rehearse`.

rehearse   the stages in order       stages    what a stage says, and why one failed
preflight  what needs no training    life      train, kill, resume, export, read back
shrunk     the model, cut down       rows      the first rows of the data, judged and kept
settings   the run's config, for a CPU         launches  processes, and the cause in their logs
reader     what a reader of the export does, without the toolkit
"""

from toolkit.rehearsal.rehearse import rehearse
from toolkit.rehearsal.stages import Result
