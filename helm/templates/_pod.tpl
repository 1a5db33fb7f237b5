{{/* What the appliance's pod, the preflight Job and the test have in common. */}}

{{- define "appliance.podSecurity" -}}
{{- if eq .Values.memlock "root" }}
runAsUser: 0
runAsGroup: 0
{{- else }}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
{{- end }}
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "appliance.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  # The default seccomp profile refuses to bind memory to a NUMA node without SYS_NICE.
  add: [SYS_NICE{{ if eq .Values.memlock "root" }}, IPC_LOCK, DAC_OVERRIDE{{ end }}]
{{- end }}

{{- define "appliance.resources" -}}
{{- $all := dict "cpu" (toString .Values.resources.cpu) -}}
{{- if .Values.resources.memoryGiB }}{{ $_ := set $all "memory" (printf "%dGi" (int .Values.resources.memoryGiB)) }}{{ end -}}
{{- if .Values.gpus.count }}{{ $_ := set $all .Values.gpus.resource (toString .Values.gpus.count) }}{{ end -}}
{{- if .Values.hugePages.size }}{{ $_ := set $all (printf "hugepages-%s" .Values.hugePages.size) (printf "%dGi" (int .Values.hugePages.amountGiB)) }}{{ end -}}
{{/* Requests equal limits: only such pods get CPUs of their own and a place beside their GPUs. */}}
limits:
{{- range $name, $amount := $all }}
  {{ $name }}: {{ $amount | quote }}
{{- end }}
requests:
{{- range $name, $amount := $all }}
  {{ $name }}: {{ $amount | quote }}
{{- end }}
{{- end }}

{{- define "appliance.environment" -}}
{{- $s := .Values.settings -}}
{{- $set := dict
  "APPLIANCE_HOST" "0.0.0.0"
  "APPLIANCE_AGENT_HOST" "0.0.0.0"
  "APPLIANCE_DEPLOYMENT" "kubernetes"
  "APPLIANCE_HOST_ROOT" "/host"
  "APPLIANCE_GATEWAY_KEYS" "/run/secrets/api_keys"
  "APPLIANCE_DEVICE" (ternary "cuda" "cpu" (eq .Values.flavour "gpu"))
  "APPLIANCE_DRAIN_SECONDS" (toString (int $s.drainSeconds))
  "APPLIANCE_HANG_SECONDS" (toString (int $s.hangSeconds))
  "APPLIANCE_HOLD_ON_FAILURE" (toString $s.holdOnFailure)
  "APPLIANCE_IGNORE_CHECKS" (join "," $s.ignoreChecks)
  "APPLIANCE_SERVED_NAME" $s.servedName
  "APPLIANCE_IMAGE_DIGEST" .Values.image.digest
  "APPLIANCE_TLS" (ternary "own" "off" (ne .Values.tls.existingSecret ""))
  "APPLIANCE_TLS_CERTIFICATE" (ternary "/run/tls/tls.crt" "" (ne .Values.tls.existingSecret ""))
  "APPLIANCE_TLS_KEY" (ternary "/run/tls/tls.key" "" (ne .Values.tls.existingSecret ""))
  "APPLIANCE_EXL3_OWNER" $s.exl3Owner
  "APPLIANCE_RECORD" .Values.record -}}
{{- if not .Values.demo }}{{ $_ := set $set "APPLIANCE_MODEL" .Values.model.path }}{{ end -}}
{{- range $name, $value := dict
  "APPLIANCE_STREAMS" $s.streams
  "APPLIANCE_CONTEXT_TOKENS" $s.contextTokens
  "APPLIANCE_TENSOR_PARALLEL" $s.tensorParallel
  "APPLIANCE_START_LIMIT_SECONDS" $s.startLimitSeconds
  "APPLIANCE_GATEWAY_MAX_BODY_BYTES" $s.maxBodyBytes
  "APPLIANCE_GATEWAY_MAX_HEADER_BYTES" $s.maxHeaderBytes -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $set $name (toString (int64 $value)) }}{{ end -}}
{{- end -}}
{{- if not (kindIs "invalid" $s.hostShare) }}{{ $_ := set $set "APPLIANCE_HOST_SHARE" (toString $s.hostShare) }}{{ end -}}
{{- range $name, $value := $set }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "appliance.hostFacts" -}}
- name: host-proc
  hostPath: {path: /proc, type: Directory}
- name: host-sys
  hostPath: {path: /sys, type: Directory}
- name: temporary
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.resources.shmGiB }}Gi}
{{- end }}

{{- define "appliance.hostMounts" -}}
- {name: host-proc, mountPath: /host/proc, readOnly: true}
- {name: host-sys, mountPath: /host/sys, readOnly: true}
- {name: temporary, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "appliance.placement" -}}
serviceAccountName: {{ include "appliance.account" . }}
automountServiceAccountToken: false
# A service called appliance would set APPLIANCE_PORT=tcp://... in every pod.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
