"""Services in processes of their own: the process, the host that serves it, clients, and the messages between them.

The engine is one such service. To host another, for example an encoder:

1. Write the service: `info`, `healthy`, `start`, `close` (`service.py: HostedService`) and methods that take one
   msgspec struct each. A method is a coroutine with one result, or returns a stream of results that has `pipe`,
   `when_done` and `close`.
2. Describe it by an `Interface` at module level: how it is created from its configuration, and its methods by name.

       ENCODER = Interface(
           name="engine.example.hosted:ENCODER",
           noun="encoder",
           config=EncoderConfig,
           create=ExampleEncoder,
           info=EncoderInfo,
           methods={"encode": Method(Images, Encoded, lambda encoder, images: encoder.encode(images))},
           topics={},
       )

3. Derive a client whose methods call those of the service.

       class EncoderClient(ServiceClient[EncoderInfo]):
           async def encode(self, images: Images) -> Encoded:
               return await self.call("encode", images)

4. Run it: `process = ServiceProcess(ENCODER, config)`, `await process.start()`, then `client = EncoderClient(ENCODER,
   process.address, process.wait_failed)`, `await client.start()`.

Errors of `engine/errors.py` cross the boundary with their types. The process is restarted when it dies, and ends with
its parent.
"""
