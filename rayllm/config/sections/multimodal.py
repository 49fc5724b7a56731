"""Options of images, sound and video."""

from rayllm.config.option import Kind, Option, State

MULTIMODAL = (
    Option(
        name="language-model-only",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Take no images, sound or video.",
    ),
    Option(
        name="limit-mm-per-prompt",
        kind=Kind.JSON,
        state=State.PLANNED,
        default={},
        help="Most images, sounds and videos of a prompt.",
    ),
    Option(
        name="enable-mm-embeds", kind=Kind.BOOL, state=State.PLANNED, default=False, help="Accept embeddings of media."
    ),
)
