"""From a model's output to the parts of an answer; a family of models has a file with its parser."""
