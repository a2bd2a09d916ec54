"""What every stage speaks: parameters, requests, batches, contexts, configuration, command line. No arithmetic.

Nothing is imported here: the API process of stage 8 uses parts of this package and must not load torch.
"""
