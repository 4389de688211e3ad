"""`rl export`: the weights of a run or a directory as a directory of their own."""
