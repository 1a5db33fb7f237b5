"""Every CUDA op against the float64 reference, on this GPU."""
