package main

import (
	"math/rand"
	"strings"
	"testing"
)

// history lets clients use some registers in a legal way: each operation takes effect at a moment between
// its call and its return.
func history(seed int64) []operation {
	random := rand.New(rand.NewSource(seed))
	values := map[uint64]uint64{}
	var operations []operation
	for number := uint64(1); number <= 2000; number++ {
		now := int64(number) * 100
		one := operation{Client: random.Intn(6), Block: uint64(random.Intn(8)), Outcome: "done"}
		one.CallNs = now - int64(random.Intn(500))
		returned := now + int64(random.Intn(500))
		one.ReturnNs = &returned
		value := number
		if one.Kind = "read"; random.Intn(2) == 0 {
			one.Kind = "write"
			values[one.Block] = value
			if random.Intn(50) == 0 {
				one.ReturnNs, one.Outcome = nil, "unanswered"
			}
		} else {
			value = values[one.Block]
		}
		one.Value = &value
		operations = append(operations, one)
	}
	return operations
}

// next returns the index of a later operation on the same block that began after this one had returned.
func next(operations []operation, at int, kind string) int {
	for later := at + 1; later < len(operations); later++ {
		one := operations[later]
		if one.Block == operations[at].Block && one.Kind == kind && one.isDone() &&
			one.CallNs > *operations[at].ReturnNs {
			return later
		}
	}
	return -1
}

// writes returns two writes to one block and a read, none of which overlap.
func writes(t *testing.T, operations []operation) (first, second, read int) {
	for first = 500; first < len(operations); first++ {
		if one := operations[first]; !one.isWrite() || !one.isDone() {
			continue
		}
		if second = next(operations, first, "write"); second < 0 {
			continue
		}
		if read = next(operations, second, "read"); read >= 0 {
			return first, second, read
		}
	}
	t.Fatal("the history has no such operations")
	return
}

func TestLegalHistoriesAreAccepted(t *testing.T) {
	for seed := int64(1); seed <= 20; seed++ {
		if found := judge(history(seed)); !found.isLegal() {
			t.Fatalf("seed %d: %+v", seed, found)
		}
	}
}

func TestStaleReadIsFound(t *testing.T) {
	operations := history(1)
	first, _, read := writes(t, operations)
	operations[read].Value = operations[first].Value
	found := judge(operations)
	if len(found.illegal) != 1 || found.illegal[0] != operations[read].Block {
		t.Fatalf("%+v", found)
	}
	// Two writes one after the other, and a read of the first.
	if len(found.smallest.operations) != 3 {
		t.Fatalf("not shrunk: %+v", found.smallest)
	}
	var text strings.Builder
	found.print(&text, "history")
	if !strings.Contains(text.String(), "1 blocks without a linear order") {
		t.Fatal(text.String())
	}
}

func TestLostWriteIsFound(t *testing.T) {
	operations := history(2)
	first, second, _ := writes(t, operations)
	// All reads that saw the second write see the first one.
	lost, kept := *operations[second].Value, operations[first].Value
	for at := range operations {
		if one := &operations[at]; !one.isWrite() && *one.Value == lost {
			one.Value = kept
		}
	}
	// One reads after both.
	read := operations[second]
	call, returned := *read.ReturnNs+1, *read.ReturnNs+2
	read.Kind, read.Value, read.CallNs, read.ReturnNs = "read", kept, call, &returned
	if found := judge(append(operations, read)); len(found.illegal) != 1 {
		t.Fatalf("%+v", found)
	}
}

func TestContentsOfNoWriteAreFound(t *testing.T) {
	operations := history(3)
	_, _, read := writes(t, operations)
	operations[read].Value = nil
	if found := judge(operations); len(found.illegal) != 1 {
		t.Fatalf("%+v", found)
	}
}

func TestWriteWithoutAnswerMayTakeEffectLate(t *testing.T) {
	text := `{"client":0,"block":1,"kind":"write","value":1,"call_ns":10,"return_ns":null,"outcome":"unanswered"}
{"client":1,"block":1,"kind":"write","value":2,"call_ns":20,"return_ns":30,"outcome":"done"}
{"client":1,"block":1,"kind":"read","value":VALUE,"call_ns":40,"return_ns":50,"outcome":"done"}
{"client":1,"block":1,"kind":"read","value":null,"call_ns":60,"return_ns":null,"outcome":"unanswered"}`
	for value, isLegal := range map[string]bool{"0": false, "1": true, "2": true, "3": false} {
		operations, err := read(strings.NewReader(strings.Replace(text, "VALUE", value, 1)))
		if err != nil {
			t.Fatal(err)
		}
		if found := judge(operations); found.isLegal() != isLegal {
			t.Fatalf("%s: %+v", value, found)
		}
	}
	if _, err := read(strings.NewReader("{}")); err == nil {
		t.Fatal("a line without an operation is read")
	}
}
