{{- define "trellis.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Labels that select the pods of the release; of a role, with (dict "root" $ "role" "decode"). */ -}}
{{- define "trellis.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "trellis.labels" -}}
{{ include "trellis.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- /* Labels that select the pods of a role that answer HTTP: of several nodes, the leader. */ -}}
{{- define "trellis.serving" -}}
{{ include "trellis.selector" . }}
{{- if gt (int (include "trellis.role" . | fromYaml).nodes) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- /* Values of a role: those of all roles, and its own over them. */ -}}
{{- define "trellis.role" -}}
{{ mergeOverwrite (deepCopy .root.Values.roleDefaults) (deepCopy (index .root.Values.roles .role)) | toYaml }}
{{- end -}}

{{- /* Names of the enabled roles, in a fixed order. */ -}}
{{- define "trellis.enabled" -}}
{{- $enabled := list -}}
{{- range $role := list "aggregated" "prefill" "decode" "encode" "router" -}}
{{- if (index $.Values.roles $role).enabled -}}{{- $enabled = append $enabled $role -}}{{- end -}}
{{- end -}}
{{- toJson $enabled -}}
{{- end -}}

{{- /* The role whose replicas compute answers for clients. */ -}}
{{- define "trellis.answering" -}}
{{- if .Values.roles.decode.enabled -}}decode{{- else -}}aggregated{{- end -}}
{{- end -}}

{{- /* The role that clients reach. */ -}}
{{- define "trellis.entrance" -}}
{{- if .Values.roles.router.enabled -}}router{{- else -}}{{ include "trellis.answering" . }}{{- end -}}
{{- end -}}

{{- define "trellis.servedModelName" -}}
{{- default .Values.model .Values.servedModelName -}}
{{- end -}}

{{- define "trellis.secretName" -}}
{{- default (include "trellis.fullname" .) .Values.secret.existing -}}
{{- end -}}

{{- define "trellis.graceSeconds" -}}
{{- add .Values.leaveSeconds .Values.drainSeconds (ternary 35 10 (eq .Values.engine "trtllm")) -}}
{{- end -}}

{{- define "trellis.target" -}}
{{- if gt (int .config.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "trellis.fullname" .root }}-{{ .role }}
{{- end -}}

{{- /* Settings of a role as a map: the chart's own, then those of the values. */ -}}
{{- define "trellis.settings" -}}
{{- $root := .root -}}
{{- $config := .config -}}
{{- $full := include "trellis.fullname" $root -}}
{{- $modelsWritten := and (or $root.Values.models.existingClaim $root.Values.models.size) (not $root.Values.models.readOnly) -}}
HOST: 0.0.0.0
PORT: "8000"
DISAGGREGATION_MODE: {{ .role }}
MODEL: {{ $root.Values.model | quote }}
SERVED_MODEL_NAME: {{ include "trellis.servedModelName" $root | quote }}
CACHE_DIR: /cache
HF_HOME: {{ ternary "/models/huggingface" "/cache/huggingface" (not (empty $modelsWritten)) }}
SHUTDOWN_GRACE_SECONDS: {{ $root.Values.drainSeconds | quote }}
{{- if ne .role "router" }}
ENGINE: {{ $root.Values.engine }}
{{- end }}
{{- if and (gt (int $config.gpus) 0) (eq $root.Values.engine "embedded") }}
DEVICE: cuda
{{- end }}
{{- if eq .role "decode" }}
PREFILL_URLS: dns+http://{{ $full }}-prefill-peers:8000
{{- end }}
{{- if and $root.Values.roles.encode.enabled (has .role (list "aggregated" "decode")) }}
ENCODE_URLS: dns+http://{{ $full }}-encode-peers:8000
{{- end }}
{{- if eq .role "router" }}
ROUTE_URLS: dns+http://{{ $full }}-{{ include "trellis.answering" $root }}-peers:8000
ROUTE_EVENTS_PORT: "5557"
ROUTE_REPLAY_PORT: "5657"
{{- end }}
{{- if and (eq .role (include "trellis.answering" $root)) (or $root.Values.kvEvents $root.Values.roles.router.enabled $root.Values.inferencePool.enabled) }}
PUBLISH_KV_EVENTS: "true"
KV_EVENTS_ENDPOINT: tcp://*:5557
KV_EVENTS_REPLAY_ENDPOINT: tcp://*:5657
{{- if $root.Values.inferencePool.enabled }}
KV_EVENTS_TOPIC: kv@$(POD_IP):8000@{{ include "trellis.servedModelName" $root }}
{{- end }}
{{- end }}
{{- if $config.engineConfig }}
EXTRA_ENGINE_ARGS: /config/engine.yaml
{{- end }}
{{- if $config.kvCache.hostMb }}
KV_HOST_CACHE_MB: {{ int64 $config.kvCache.hostMb | quote }}
{{- end }}
{{- if $config.kvCache.diskMb }}
KV_DISK_CACHE_MB: {{ int64 $config.kvCache.diskMb | quote }}
KV_DISK_CACHE_DIR: /kv
{{- end }}
{{- if gt (int $config.nodes) 1 }}
GPUS_PER_NODE: {{ $config.gpus | quote }}
ENGINE_ON_DEATH: exit
{{- end }}
{{- end -}}

{{- /* The container's environment. POD_IP comes first, since others refer to it. */ -}}
{{- define "trellis.env" -}}
{{- $own := include "trellis.settings" . | fromYaml -}}
{{- $given := mergeOverwrite (deepCopy .root.Values.settings) (deepCopy .config.settings) -}}
{{- $all := merge $own $given -}}
{{- /* All GPUs share each layer, unless something else is said. */ -}}
{{- $parallel := or $.config.engineConfig (hasKey $given "TENSOR_PARALLEL_SIZE") (hasKey $given "PIPELINE_PARALLEL_SIZE") -}}
{{- if and (eq .root.Values.engine "trtllm") (gt (int .config.gpus) 0) (not $parallel) -}}
{{- $_ := set $all "TENSOR_PARALLEL_SIZE" (toString (mul .config.gpus .config.nodes)) -}}
{{- end -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- range $name := keys $all | sortAlpha }}
- name: {{ $name }}
  {{- $value := index $all $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- $internal := or .root.Values.roles.prefill.enabled .root.Values.roles.encode.enabled }}
{{- range $name := list "API_KEYS" "HF_TOKEN" "INTERNAL_SECRET" }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ include "trellis.secretName" $.root }}, key: {{ $name }}, optional: {{ not (and $internal (eq $name "INTERNAL_SECRET")) }}}}
{{- end }}
{{- with .config.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "trellis.volume" -}}
{{- if .storageClass -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      storageClassName: {{ .storageClass }}
      resources: {requests: {storage: {{ .size }}}}
{{- else -}}
emptyDir: {sizeLimit: {{ .size }}}
{{- end -}}
{{- end -}}

{{- /* Template of a pod, with (dict "root" $ "role" "decode" "config" $config "part" "leader"); part is "", "leader" or "worker". */ -}}
{{- define "trellis.pod" -}}
{{- $root := .root -}}
{{- $config := .config -}}
{{- $full := include "trellis.fullname" $root -}}
{{- $models := or $root.Values.models.existingClaim $root.Values.models.size -}}
{{- $image := $config.image -}}
metadata:
  labels:
    {{- /* Without versions: a new chart alone restarts nothing. */}}
    {{- include "trellis.selector" . | nindent 4 }}
    {{- if eq .role (include "trellis.answering" $root) }}
    llm-d.ai/engine-type: trtllm-serve
    inference.networking.k8s.io/engine-type: trtllm-serve
    {{- end }}
    {{- with $config.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    cluster-autoscaler.kubernetes.io/safe-to-evict: "true"
    kubectl.kubernetes.io/default-container: trellis
    {{- if $config.engineConfig }}
    checksum/engine-config: {{ $config.engineConfig | sha256sum }}
    {{- end }}
    {{- if not $root.Values.secret.existing }}
    checksum/secret: {{ toYaml $root.Values.secret | sha256sum }}
    {{- end }}
    {{- with $config.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  terminationGracePeriodSeconds: {{ include "trellis.graceSeconds" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $config.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $config.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: trellis
      image: {{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
      imagePullPolicy: {{ $image.pullPolicy }}
      {{- if .part }}
      command: [/opt/nvidia/nvidia_entrypoint.sh, bash, /scripts/{{ .part }}.sh]
      {{- else }}
      args: [serve]
      {{- end }}
      env:
        {{- include "trellis.env" . | nindent 8 }}
      {{- if ne .part "worker" }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        {{- /* A router waits for replicas: that is no reason to restart it. */}}
        httpGet: {path: {{ ternary "/health/live" "/health/ready" (eq .role "router") }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ ternary 24 (ceil (divf $root.Values.startupSeconds 5)) (eq .role "router") }}
      readinessProbe:
        httpGet: {path: /health/ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /health/live, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- else }}
      ports:
        - {name: ssh, containerPort: 2222}
      readinessProbe:
        tcpSocket: {port: ssh}
        periodSeconds: 5
      {{- end }}
      lifecycle:
        preStop:
          {{- if .part }}
          exec: {command: [bash, /scripts/drain.sh, {{ .part }}, {{ $root.Values.leaveSeconds | quote }}]}
          {{- else }}
          sleep: {seconds: {{ $root.Values.leaveSeconds }}}
          {{- end }}
      resources:
        {{- $resources := deepCopy $config.resources }}
        {{- if $config.gpus }}
        {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" $config.gpus)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        {{- /* The entry point of NVIDIA's image chooses a driver library below /usr/local/cuda. */}}
        readOnlyRootFilesystem: {{ ne $root.Values.engine "trtllm" }}
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $models }}
        - {name: models, mountPath: /models, readOnly: {{ $root.Values.models.readOnly }}}
        {{- end }}
        {{- if $config.kvCache.diskMb }}
        - {name: kv, mountPath: /kv}
        {{- end }}
        {{- if $config.engineConfig }}
        - {name: config, mountPath: /config, readOnly: true}
        {{- end }}
        {{- if .part }}
        - {name: scripts, mountPath: /scripts, readOnly: true}
        - {name: ssh, mountPath: /ssh, readOnly: true}
        {{- end }}
  volumes:
    - name: cache
      {{- include "trellis.volume" $config.cache | nindent 6 }}
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $config.shmSize }}}
    {{- if $models }}
    - name: models
      persistentVolumeClaim: {claimName: {{ default (printf "%s-models" $full) $root.Values.models.existingClaim }}, readOnly: {{ $root.Values.models.readOnly }}}
    {{- end }}
    {{- if $config.kvCache.diskMb }}
    - name: kv
      {{- /* A tenth more than the blocks, for the file system's own. */}}
      {{- include "trellis.volume" (dict "size" (printf "%dMi" (div (mul $config.kvCache.diskMb 11) 10)) "storageClass" $config.kvCache.storageClass) | nindent 6 }}
    {{- end }}
    {{- if $config.engineConfig }}
    - name: config
      configMap: {name: {{ $full }}-{{ .role }}}
    {{- end }}
    {{- if .part }}
    - name: scripts
      configMap: {name: {{ $full }}-multinode}
    - name: ssh
      secret: {secretName: {{ $root.Values.multinode.sshSecret }}, defaultMode: 0440}
    {{- end }}
  {{- if not .part }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "trellis.selector" . | nindent 10 }}
  {{- end }}
  {{- with $config.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $config.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $config.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
