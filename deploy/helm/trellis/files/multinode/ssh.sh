# Sourced by the others: keys of the group's Secret for both ends of ssh, and a daemon on port 2222 of this pod. MPI
# starts its ranks through it. Everything lies in the home folder, since the user is nobody special.
folder="$HOME/.ssh"
mkdir -p "$folder"
chmod 700 "$folder"
install -m 600 /ssh/ssh-privatekey "$folder/id"
install -m 600 /ssh/ssh-publickey "$folder/authorized_keys"
cat > "$folder/config" <<CONFIG
Host *
  Port 2222
  IdentityFile $folder/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONFIG
rm -f "$folder/host" "$folder/host.pub"
ssh-keygen -q -t ed25519 -N "" -f "$folder/host"
cat > "$folder/sshd_config" <<CONFIG
Port 2222
HostKey $folder/host
PidFile none
AuthorizedKeysFile $folder/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
CONFIG
