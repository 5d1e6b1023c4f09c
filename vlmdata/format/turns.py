"""Names of the manifest's counts under ``turns``: what the chat template did to assistant turns."""

from __future__ import annotations

#: Assistant turns whose reasoning is in no sample, because the template left it out.
DROPPED_REASONING = "dropped_reasoning"
#: Rows with such turns.
ROWS_WITH_DROPPED_REASONING = "rows_with_dropped_reasoning"
#: Rows with a learned turn that follows another text than at inference, where it would be the last turn.
ROWS_UNLIKE_INFERENCE = "rows_unlike_inference"
