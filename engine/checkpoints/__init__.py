"""From a model setting to a checkpoint folder, and the facts that the folder states about its model."""
