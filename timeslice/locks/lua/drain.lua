--[[
Lets nobody into the group while a node is drained for maintenance, or ends that. Another pause is not touched.
ARGV  1 floor  2 node  3 '1' drain, '0' end it  4 by whom  5 why, or ''
Reply ok changed | unknown
Events NodeDrained, NodeUndrained, and what advance and reap emit
--]]
-- @include group waiters gangs residency nodes lease advance
local node, drain, by, why = ARGV[2], ARGV[3] == '1', string.gsub(ARGV[4], '[;%c]', '_'), ARGV[5]

begin(true)
local drained = is_drained(node)
if not drained and not redis.call('ZSCORE', nodes_key, node) then
  return { 'unknown' }
end
settle_clock()
if drain and not drained then
  set('drains', (S.drains == '' and '' or S.drains .. '; ') .. 'node ' .. node .. ' by ' .. by)
  emit('NodeDrained', 'node', node, 'by', ARGV[4], 'reason', why)
elseif drained and not drain then
  undrain(node)
  emit('NodeUndrained', 'node', node, 'by', ARGV[4], 'reason', why)
end
reap()
advance()
save()
return { 'ok', drained ~= drain and 1 or 0 }
