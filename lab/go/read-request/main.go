// Read-request reads requests for certificates as Kubernetes' API server and its signer do: encoding/pem's first block, then crypto/x509.
//
// Each line of its input is a request in base64, as a CertificateSigningRequest has it in spec.request; each line of its output says in JSON what was read.
package main

import (
	"bufio"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
)

type reading struct {
	Error   string `json:"error"`
	Subject []byte `json:"subject"`
	Key     []byte `json:"key"`
	Groups  int    `json:"groups"`
	Name    string `json:"name"`
	Extras  int    `json:"extras"`
}

// The API server's ParseCSR (pkg/apis/certificates/v1/helpers.go) and what its validation adds.
func parse(text string) (*x509.CertificateRequest, error) {
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(raw)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("PEM block type must be CERTIFICATE REQUEST")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return request, request.CheckSignature()
}

func read(text string) reading {
	request, err := parse(text)
	if err != nil {
		return reading{Error: err.Error()}
	}
	extras := len(request.Extensions) + len(request.DNSNames) + len(request.IPAddresses) + len(request.EmailAddresses) + len(request.URIs)
	subject := request.Subject
	return reading{"", request.RawSubject, request.RawSubjectPublicKeyInfo, len(subject.Organization), subject.CommonName, extras}
}

func main() {
	lines, out := bufio.NewScanner(os.Stdin), bufio.NewWriter(os.Stdout)
	lines.Buffer(nil, 16<<20)
	answers := json.NewEncoder(out)
	for lines.Scan() {
		if err := answers.Encode(read(lines.Text())); err != nil {
			fail(err)
		}
	}
	if err := errors.Join(lines.Err(), out.Flush()); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
