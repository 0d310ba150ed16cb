"""Console commands that set up what sparkring runs on."""
