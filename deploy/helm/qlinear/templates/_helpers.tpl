{{/* Names, labels, and what several templates compute. */}}

{{- define "qlinear.fullname" -}}
{{- $default := ternary .Release.Name (printf "%s-qlinear" .Release.Name) (contains "qlinear" .Release.Name) -}}
{{- .Values.fullnameOverride | default $default | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* The name is fixed: it becomes the job's name in Prometheus, which alerts ask for. */}}
{{- define "qlinear.selector" -}}
app.kubernetes.io/name: qlinear
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "qlinear.labels" -}}
{{ include "qlinear.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "qlinear.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "qlinear.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where a downloaded model lies, or what is served of the volume. */}}
{{- define "qlinear.modelFile" -}}
{{- base (urlParse .Values.model.download.url).path -}}
{{- end }}

{{- define "qlinear.modelPath" -}}
{{- $path := .Values.model.path -}}
{{- if .Values.model.download.url -}}{{- $path = $path | default (include "qlinear.modelFile" .) -}}{{- end -}}
{{- printf "/models/%s" $path | trimSuffix "/" -}}
{{- end }}

{{/* Port of a URL. */}}
{{- define "qlinear.urlPort" -}}
{{- $url := urlParse . -}}
{{- $given := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $given | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end }}

{{/* Bytes of a quantity with a binary suffix, or without one. */}}
{{- define "qlinear.bytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexReplaceAll "^[0-9]+" . "" -}}
{{- $sizes := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul $number (get $sizes $unit | int64) -}}
{{- end }}

{{/* Everything that values.schema.json cannot say. */}}
{{- define "qlinear.check" -}}
{{- $model := .Values.model -}}
{{- if and $model.volume $model.download.url -}}
{{- fail "model.volume and model.download.url are both set: give one of them" -}}
{{- end -}}
{{- if not (or $model.volume $model.download.url) -}}
{{- fail "there is no model: set model.volume, or model.download.url and model.download.sha256" -}}
{{- end -}}
{{- $memory := include "qlinear.bytes" .Values.resources.limits.memory | int64 -}}
{{- if lt $memory (mul 2 (int64 .Values.server.maxQueueBytes)) -}}
{{- fail (printf "resources.limits.memory is %s; expected at least twice server.maxQueueBytes (%d), which a GPU server locks when it starts" .Values.resources.limits.memory (int64 .Values.server.maxQueueBytes)) -}}
{{- end -}}
{{- if lt (int .Values.autoscaling.maxReplicas) (int .Values.autoscaling.minReplicas) -}}
{{- fail (printf "autoscaling.maxReplicas is %d; expected at least autoscaling.minReplicas (%d)" (int .Values.autoscaling.maxReplicas) (int .Values.autoscaling.minReplicas)) -}}
{{- end -}}
{{- end }}
