"""The routes by which a bucket's selected values become its average, and their costs."""
