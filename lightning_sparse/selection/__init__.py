"""Taking out of a flat bucket what is sent, and what stays: the hard threshold on CPUs and GPUs, others by asking."""
