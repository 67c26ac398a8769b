"""Where a number of a platform comes from, and the kinds of text in its file."""

from typing import Annotated, Literal

from pydantic import StringConstraints

Evidence = Literal["measured", "published", "fitted", "assumed"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
