"""Views of a run directory: `report.html`, `zerolm status`, plots, and the text of a batch.

They work while the run is in progress and after it has ended, even with damaged files. Must not
depend on the training loop, and must not write to the run except for `report.html`.
"""
