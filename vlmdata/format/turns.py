"""Names of the manifest's counts under ``turns``: what the chat template did to assistant turns."""

from __future__ import annotations

#: Assistant turns whose reasoning is in no sample, because the template left it out.
DROPPED_REASONING = "dropped_reasoning"
#: Those of them that are the last turn of their conversation: the template writes no reasoning at all.
LAST_TURNS_WITH_DROPPED_REASONING = "last_turns_with_dropped_reasoning"
#: Rows with turns of dropped reasoning.
ROWS_WITH_DROPPED_REASONING = "rows_with_dropped_reasoning"
#: Rows with a learned turn that follows another text than at inference, where it would be the last turn.
ROWS_UNLIKE_INFERENCE = "rows_unlike_inference"
