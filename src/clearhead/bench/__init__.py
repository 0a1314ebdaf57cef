"""`clearhead bench`: the engine beside its peers, interleaved in one process, as ratios and shares of limits."""
