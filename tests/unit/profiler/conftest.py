"""The scripts are programs to be profiled: they are run, not imported for their doctests."""

collect_ignore = ["scripts"]
