--[[
A holder says what it waits for elsewhere, so that others can see a circle. The entry alone proves nothing: whether
that waiter still waits is read in the other group.
ARGV  1 floor  2 lease id  3 entry: group/waiter  4 '1' it waits, '0' no longer
Reply ok | not_holder
--]]
-- @include group
local lease, entry, waits = ARGV[2], ARGV[3], ARGV[4] == '1'
local MOST = 16 -- waits of one holder; the oldest is dropped

begin(true, FIELD_MAX)
if S.lease_id ~= lease then
  return { 'not_holder' }
end
local entries, found = {}, false
for other in string.gmatch(S.waits_on, '%S+') do
  found = found or other == entry
  if waits or other ~= entry then
    entries[#entries + 1] = other
  end
end
if waits and not found then
  entries[#entries + 1] = entry
  if #entries > MOST then
    table.remove(entries, 1)
  end
end
settle_clock()
set('waits_on', table.concat(entries, ' '))
save()
return { 'ok' }
