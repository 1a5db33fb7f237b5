{{- define "appliance.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "appliance.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "appliance.labels" -}}
{{ include "appliance.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "appliance.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Values.flavour }}{{ end }}
{{- end }}

{{- define "appliance.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "appliance.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "appliance.secret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-keys" (include "appliance.name" .)) }}
{{- end }}

{{- define "appliance.storeClaim" -}}
{{- if eq .Values.store.type "existingClaim" }}{{ .Values.store.existingClaim }}{{ else }}{{ include "appliance.name" . }}-models{{ end }}
{{- end }}

{{- define "appliance.stateClaim" -}}
{{ .Values.state.existingClaim | default (printf "%s-state" (include "appliance.name" .)) }}
{{- end }}
