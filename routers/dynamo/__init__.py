"""A replica as a worker of a Dynamo graph: requests come over Dynamo's request plane, beside HTTP."""
