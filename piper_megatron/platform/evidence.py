"""Where a number of a platform comes from, and the kinds of text in its file."""

from typing import Annotated, Literal

from pydantic import StringConstraints

from piper_megatron.strict import StrictModel

Evidence = Literal["measured", "published", "fitted", "assumed"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class Stated(StrictModel):
    """Numbers with one origin.

    Attributes:
        evidence: `measured` or `published` by the source, `fitted` to the source's measurements, or
            `assumed`.
        source: where the numbers come from, or how they follow from what is published.
    """

    evidence: Evidence
    source: Text
