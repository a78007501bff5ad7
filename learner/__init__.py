"""The learner: objectives, advantages, log-probs of torch models, the DeepSpeed rank, the reference worker."""
