"""What the verbs found out, for people: on the terminal and as one HTML file.

`summary.py`, `times.py` and `sections.py` say what is said, once; `terminal.py` and `html.py` lay it out;
`picture.py` and `timeline.py` draw. Nothing here measures or decides: it all comes from `results.py`.
"""
