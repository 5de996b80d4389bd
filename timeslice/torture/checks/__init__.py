"""The rules by which a history is judged, one file each. Each is a pure function of a `Story` and its `Terms`.

A rule is sound before it is sharp: what a killed process was about to do, and whether an unanswered request arrived,
is unknown, and an unknown outcome is never a violation.
"""
