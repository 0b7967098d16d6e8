"""What is there before training: token preference, contraction, and the seed that a model keeps."""
