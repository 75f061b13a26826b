{{- define "cistern.labels" -}}
app.kubernetes.io/part-of: cistern
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "cistern.image" -}}
{{- $image := .Values.image | default dict -}}
{{- $repository := $image.repository | default "localhost/cistern" -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "cistern.pullPolicy" -}}
{{ (.Values.image | default dict).pullPolicy | default "IfNotPresent" }}
{{- end }}

{{- define "cistern.agentAccount" -}}
{{ ((.Values.serviceAccounts).agent).name | default "cistern" }}
{{- end }}

{{- define "cistern.operatorAccount" -}}
{{ ((.Values.serviceAccounts).operator).name | default "cistern-operator" }}
{{- end }}

{{- define "cistern.agentAccountCreated" -}}
{{- if ne (toString (((.Values.serviceAccounts).agent).create)) "false" }}true{{ end }}
{{- end }}

{{- define "cistern.operatorAccountCreated" -}}
{{- if ne (toString (((.Values.serviceAccounts).operator).create)) "false" }}true{{ end }}
{{- end }}

{{- define "cistern.uninstalls" -}}
{{- if ne (toString ((.Values.uninstall).enabled)) "false" }}true{{ end }}
{{- end }}

{{/* Identity of the pod, and address of the API server. */}}
{{- define "cistern.env" -}}
- name: K8S_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: CISTERN_K8S_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- include "cistern.apiServer" . }}
{{- end }}

{{- define "cistern.apiServer" -}}
{{- with .Values.k8sServiceHost }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ . | quote }}
{{- end }}
{{- with .Values.k8sServicePort }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ . | toString | quote }}
{{- end }}
{{- end }}

{{- define "cistern.probe" -}}
httpGet:
  host: 127.0.0.1
  scheme: HTTP
  path: {{ .path }}
  port: {{ .port }}
{{- end }}

{{/* Keys of cilium-config whose value is null are left out. */}}
{{- define "cistern.config" -}}
{{- $cni := .Values.cni | default dict -}}
{{- $operator := .Values.operator | default dict -}}
{{- $ipam := .Values.ipam | default dict -}}
{{- $pool := $ipam.operator | default dict -}}
{{- $config := dict
  "debug" ((.Values.debug).enabled)
  "ipam" $ipam.mode
  "k8s-require-ipv4-pod-cidr" ((.Values.k8s).requireIPv4PodCIDR)
  "k8s-require-ipv6-pod-cidr" ((.Values.k8s).requireIPv6PodCIDR)
  "annotate-k8s-node" .Values.annotateK8sNode
  "enable-ipv4" ((.Values.ipv4).enabled)
  "enable-ipv6" ((.Values.ipv6).enabled)
  "routing-mode" .Values.routingMode
  "auto-direct-node-routes" .Values.autoDirectNodeRoutes
  "ipv4-native-routing-cidr" .Values.ipv4NativeRoutingCIDR
  "mtu" .Values.MTU
  "devices" .Values.devices
  "enable-ipv4-masquerade" .Values.enableIPv4Masquerade
  "enable-bpf-masquerade" ((.Values.bpf).masquerade)
  "bpf-nat-global-max" ((.Values.bpf).natMax)
  "enable-ip-masq-agent" ((.Values.ipMasqAgent).enabled)
  "node-port-range" ((.Values.nodePort).range)
  "cni-exclusive" $cni.exclusive
  "agent-health-port" .Values.healthPort
  "leader-election" $operator.inDaemonSet
-}}
{{- if eq ($ipam.mode | default "cluster-pool") "cluster-pool" }}
{{- $_ := set $config "cluster-pool-ipv4-cidr" $pool.clusterPoolIPv4PodCIDRList }}
{{- $_ := set $config "cluster-pool-ipv4-mask-size" $pool.clusterPoolIPv4MaskSize }}
{{- end }}
{{- with .Values.logOptions }}{{ $_ := set $config "log-opt" (toJson .) }}{{ end }}
{{- with $operator.apiPort }}{{ $_ := set $config "operator-api-serve-addr" (printf "127.0.0.1:%d" (int64 .)) }}{{ end }}
{{- if (.Values.prometheus).enabled }}
{{- $_ := set $config "prometheus-serve-addr" (printf ":%d" (int64 (.Values.prometheus.port | default 9962))) }}
{{- end }}
{{- if ($operator.prometheus).enabled }}
{{- $_ := set $config "operator-prometheus-serve-addr" (printf ":%d" (int64 ($operator.prometheus.port | default 9963))) }}
{{- end }}
{{- if $cni.configMap }}
{{- $_ := set $config "read-cni-conf" (printf "/etc/cistern/cni/%s" ($cni.configMapKey | default "cni-config")) }}
{{- end }}
{{- if $cni.customConf }}{{ $_ := set $config "custom-cni-conf" true }}{{ end }}
{{- $_ := set $config "write-cni-conf-when-ready" "/etc/cni/net.d/05-cistern.conflist" }}
{{- range $key, $value := .Values.extraConfig }}{{ $_ := set $config $key $value }}{{ end }}
{{- range $key, $value := $config }}
{{- if kindIs "slice" $value }}
{{ $key }}: {{ join " " $value | quote }}
{{- else if kindIs "float64" $value }}
{{ $key }}: {{ int64 $value | toString | quote }}
{{- else if kindIs "map" $value }}
{{ $key }}: {{ toJson $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
{{ $key }}: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The operator's permissions; also the agents' with operator.inDaemonSet. */}}
{{- define "cistern.operatorClusterRules" -}}
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [create]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [ciliumnodes.cilium.io]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [cilium.io]
  resources: [ciliumnodes]
  verbs: [list, watch, patch, delete]
- apiGroups: [cilium.io]
  resources: [ciliumnodes/status]
  verbs: [patch]
{{ include "cistern.eventRules" . }}
{{- end }}

{{- define "cistern.eventRules" -}}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{- define "cistern.operatorRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [cistern-operator]
  verbs: [get, update]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create]
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [cistern-ipam]
  verbs: [get, patch]
{{- end }}
