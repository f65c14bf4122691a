"""Where a training's time goes, what it computes again and again, and what that is worth.

`workloads.profile` is `fl.profile`. It is not imported here: profiling a script needs no torch on this side.
"""
