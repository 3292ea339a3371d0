{{/* The init container that fetches a model; the name appears only once the bytes are right. */}}
{{- define "qlinear.download" -}}
{{- $download := .Values.model.download -}}
- name: download
  image: {{ $download.image | quote }}
  command: [sh, -euc]
  args:
    - |
      cd "$FOLDER"
      if [ -f "$FILE" ]; then exit 0; fi # the container was restarted, the volume was not
      set --
      if [ -n "${HEADER:-}" ]; then set -- --header "@$HEADER"; fi
      curl --fail --silent --show-error --location --retry 5 --output "$FILE.part" "$@" "$URL"
      echo "$SHA256  $FILE.part" | sha256sum -c -
      mv "$FILE.part" "$FILE"
  env:
    - {name: FOLDER, value: /models}
    - {name: FILE, value: {{ include "qlinear.modelFile" . | quote }}}
    - {name: URL, value: {{ $download.url | quote }}}
    - {name: SHA256, value: {{ $download.sha256 | quote }}}
    {{- if $download.headerSecret }}
    - {name: HEADER, value: /header/header}
    {{- end }}
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 256Mi}
  securityContext:
    {{- include "qlinear.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    {{- if $download.headerSecret }}
    - {name: header, mountPath: /header, readOnly: true}
    {{- end }}
{{- end }}
