"""Where a training's time goes, what it computes again and again, and what that is worth."""
