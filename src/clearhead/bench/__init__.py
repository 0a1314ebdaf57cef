"""`clearhead bench`: the engine beside its peers, interleaved in one process, as ratios and as shares of the machine's limits."""
