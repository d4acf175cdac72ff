# A node of a group but the first: it waits for the leader to start ranks here.
set -euo pipefail
. /scripts/ssh.sh
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$folder/sshd_config"
