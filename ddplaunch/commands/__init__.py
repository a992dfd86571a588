"""All that can be typed besides ``run``: a folder or a file each, with its options, its logic and its page."""
