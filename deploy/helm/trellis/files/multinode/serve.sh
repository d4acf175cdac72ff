# The server, for trtllm-llmapi-launch, which splits its command at spaces. drain.sh needs its process id.
echo $$ > /tmp/trellis.pid
exec trellis serve
